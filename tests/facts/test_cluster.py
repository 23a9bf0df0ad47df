"""Clusters: short names, files, and what cannot exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from closeranks.core.errors import ConfigError, UserError
from closeranks.facts.cluster import find_cluster, load_cluster, parse_cluster, with_devices
from closeranks.facts.device_table import built_in_devices


def test_short_names() -> None:
    cluster = parse_cluster("64xh100")
    assert (cluster.num_devices, cluster.num_hosts, cluster.devices_on_host) == (64, 8, 8)
    assert cluster.device.name == "H100-SXM"
    assert cluster.inter_host_bytes_per_s == pytest.approx(50e9 * 0.8)
    assert parse_cluster("NVIDIA H200").num_devices == 1
    assert parse_cluster("16,384 x H100-80GB-SXM").num_hosts == 2048
    assert parse_cluster(" 8XH100 ") == parse_cluster("8 x h100") == parse_cluster("8xh100-sxm")


def test_every_device_names_its_links_and_its_source() -> None:
    table = built_in_devices()
    assert {"A100-80GB", "H100-SXM", "H200", "B200", "GB200", "MI300X", "L40S", "V100-32GB", "CPU"} <= set(
        table.devices
    )
    for device in table.devices.values():
        assert device.source
        assert table.link(device.intra_host).bytes_per_s >= table.link(device.inter_host).bytes_per_s / 8
        assert all(device.reachable(precision) < device.peak(precision) for precision in device.peak_flops)
    assert all(link.source for link in table.links.values())


def test_a_precision_the_device_does_not_have_runs_in_fp32() -> None:
    device = built_in_devices().device("v100")
    assert device.peak("bf16") == device.peak("fp32")
    assert device.reachable("bf16") == device.reachable("fp32")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("64xh10", "there is no device 'h10'"),
        ("0xh100", "it has 0 devices"),
        ("12xh100", "12 devices do not fill hosts of 8"),
        ("64", "'64' is not a cluster"),
        ("", "'' is not a cluster"),
        ("-8xh100", "it has -8 devices"),
        ("64xh100:8", "'64xh100:8' is not a cluster"),
        ("h100x64", 'Write "64xh100"'),
        ("H100:64", 'Write "64xh100"'),
        ("99999999999999999999999xh100", "devices"),
    ],
)
def test_what_cannot_exist_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_cluster(text)


def test_an_unknown_device_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        parse_cluster("64xh1000")


FILE = """
device = "a100"
num_devices = 32
intra_host = "nvlink3"
inter_host = { gb_per_s = 12.5, latency_us = 5, efficiency = 0.9 }
rails = 4
price_per_hour = 1.25
currency = "EUR"
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    cluster = find_cluster(str(path))
    assert (cluster.num_hosts, cluster.price_per_hour, cluster.currency) == (4, 1.25, "EUR")
    assert cluster.inter_host_bytes_per_s == pytest.approx(12.5e9 * 0.9 / 2)  # four cards for eight devices


def test_a_file_with_a_device_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    (tmp_path / "devices.toml").write_text(
        '[[device]]\nname = "Z1"\nmemory_gib = 8\nmemory_gb_per_s = 100\npeak_tflops = { fp32 = 1, bf16 = 4 }\n'
        "sustained = 0.9\n"
        'intra_host = "wire"\n[[link]]\nname = "wire"\ngb_per_s = 1\n'
    )
    path.write_text('device = "z1"\ntable = "devices.toml"\nnum_devices = 2\n')
    cluster = load_cluster(path)
    assert cluster.device.peak("bf16") == 4e12
    assert cluster.device.sustained == 0.9
    assert cluster.intra_host.bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('device = "a100"\nnum_devices = 32\ninter_host = { gb_per_s = 0 }', "gb_per_s of the link inter_host"),
        ('device = "a100"\nnum_devices = 16\ninter_host = { gb_per_s = nan }', "gb_per_s of the link inter_host"),
        ('device = "a100"\nnum_devices = 16\ninter_host = { gb_per_s = 5, latency_us = -1 }', "latency_us of the link"),
        ('device = "a100"\nnum_devices = -1', "it has -1 devices"),
        ('device = "a100"\nnum_devices = 0', "it has 0 devices. Name from 1"),
        ('device = "a100"\nnum_devices = 1000000000', "it has 1,000,000,000 devices"),
        ('device = "a100"\nnum_devices = 12', "Name a multiple of 8, such as 8 or 16"),
        ('device = "a100"\ndevices_per_host = 1000000000', "its hosts have 1,000,000,000 devices"),
        ('device = "a100"\ndevices_per_host = 0', "its hosts have 0 devices"),
        ('device = "a100"\nrails = 0', "rails is 0: name the network cards"),
        ('device = "a100"\nrails = -2', "its hosts have -2 network cards"),
        ('device = "a100"\nnvlink_domain = -2', "-2 devices share its fast link"),
        ('device = "a100"\nprice_per_hour = inf', "costs inf"),
        ('device = "a100"\nprice_per_hour = nan', "costs nan"),
        ('device = "a100"\nprice_per_hour = "2"', "price_per_hour must be a number"),
        ('device = "a100"\ndisk_gb_per_s = -1', "its disks write -1e"),
        ('device = "a100"\nnum_devices = 8.5', "num_devices must be a whole number"),
        ('device = "a100"\nintra_host = 3', "intra_host must be text"),
        ('device = "a100"\nnumber_devices = 3', "there is no key 'number_devices'. Did you mean 'num_devices'?"),
        ('device = "h1000"', "there is no device 'h1000'. Did you mean"),
        ("num_devices = 3", "it needs a device"),
        ('device = "a100"\nintra_host = "nvlink9"', "there is no link 'nvlink9'"),
        ("device = ", "cannot be used"),
        ('device = "a100"\nprice_per_hour = -1', "costs -1"),
        ('device = { name = "x", memory_gib = 1, memory_gb_per_s = 1 }', "needs peak_tflops"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        find_cluster(str(path))
    assert str(caught.value).startswith(f"the cluster {path} cannot be used: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        find_cluster("no-such-cluster.toml")


def test_what_is_no_text_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        find_cluster(str(tmp_path))
    binary = tmp_path / "cluster.toml"
    binary.write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(UserError, match="it is not a text file"):
        find_cluster(str(binary))


def test_failures_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('device = "a100"\nfailures = "ours.toml"')
    assert find_cluster(str(path)).failures == str(tmp_path / "ours.toml")
    path.write_text('device = "a100"\nfailures = "spot"')
    assert find_cluster(str(path)).failures == "spot"


def test_other_sizes_of_the_same_cluster() -> None:
    small = with_devices(parse_cluster("64xh100"), 4)
    assert (small.num_hosts, small.devices_per_host) == (1, 4)
    assert with_devices(small, 1024).num_hosts == 128
