"""Makes the files of ``tfrecord/`` with the tool that owns the format.

Run in an environment of its own: ``pip install tensorflow-cpu && python make_tfrecord.py`` (made with 2.21.0).
``expected.json`` says what TensorFlow was given, and what it reads back: bytes as Latin-1 text.
"""

import gzip
import json
import shutil
from pathlib import Path

import tensorflow as tf

HERE = Path(__file__).parent / "tfrecord"


def feature(value: list) -> tf.train.Feature:
    if all(isinstance(one, bytes) for one in value) and value:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if all(isinstance(one, float) for one in value) and value:
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))


def example(number: int) -> dict[str, list]:
    return {
        "payload": [bytes(range(number, number + 40))],
        "label": [number],
        "tokens": list(range(number + 1)),
        "signed": [-1, 0, 1, -(2**63), 2**63 - 1, 127, 128, 300],
        "weights": [0.5, -1.25e10, float(number)],
        "parts": [b"a", b"", "ä".encode()],
        "nothing": [],
        "text": [f"line {number} ".encode() * (number % 3 + 1)],
    }


def write(path: Path, rows: list[dict[str, list]], **options: str) -> None:
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(**options) if options else None) as out:
        for row in rows:
            features = tf.train.Features(feature={name: feature(value) for name, value in row.items()})
            out.write(tf.train.Example(features=features).SerializeToString())


def read(path: Path) -> list[dict[str, list]]:
    rows = []
    for data in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        found = tf.train.Example.FromString(data).features.feature
        rows.append({name: list(getattr(one, one.WhichOneof("kind")).value) for name, one in found.items()})
    return rows


def plain(rows: list[dict[str, list]]) -> list[dict[str, list]]:
    text = lambda one: one.decode("latin-1") if isinstance(one, bytes) else one  # noqa: E731
    return [{name: [text(one) for one in value] for name, value in row.items()} for row in rows]


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "two").mkdir(parents=True)
    rows = [example(number) for number in range(7)]
    for part, some in enumerate((rows[:4], rows[4:])):
        write(HERE / "two" / f"train.tfrecord-{part:05d}-of-00002", some)
    both = [row for path in sorted((HERE / "two").iterdir()) for row in read(path)]
    (HERE / "expected.json").write_text(json.dumps(plain(both)))
    (HERE / "packed").mkdir()
    write(HERE / "packed" / "gzip.tfrecord", rows[:2], compression_type="GZIP")
    write(HERE / "packed" / "zlib.tfrecord", rows[:2], compression_type="ZLIB")
    assert gzip.decompress((HERE / "packed" / "gzip.tfrecord").read_bytes())
    (HERE / "other").mkdir()
    lists = tf.train.FeatureLists(feature_list={"a": tf.train.FeatureList(feature=[feature([1])])})
    with tf.io.TFRecordWriter(str(HERE / "other" / "sequence.tfrecord")) as out:
        out.write(tf.train.SequenceExample(feature_lists=lists).SerializeToString())
