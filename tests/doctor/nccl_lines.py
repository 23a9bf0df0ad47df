"""What NCCL prints with NCCL_DEBUG=INFO on four ranks, two to each of two hosts: formats of 2.27, 2.21 and 2.4."""

from __future__ import annotations

IB = """\
n1:983:983 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
n1:983:983 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>
n1:983:983 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n1:983:1261 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
n1:983:1261 [0] NCCL INFO NCCL_IB_HCA set to mlx5
n1:983:1261 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5.
n1:983:1261 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.5<0>
n1:983:1261 [0] NCCL INFO Using network IB
n1:983:1261 [0] NCCL INFO ncclCommInitRankConfig comm 0x557fe7 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 18000 commId 0x5ae77eb5ea4ec1ee - Init START
n1:983:1261 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
n1:983:1261 [0] NCCL INFO comm 0x557fe7 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
n1:983:1261 [0] NCCL INFO Channel 00/02 :    0   1   2   3
n1:983:1261 [0] NCCL INFO Trees [0] 1/2/-1->0->-1 [1] 1/-1/-1->0->2
n1:983:1261 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:983:1261 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:983:1261 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:984:1262 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA
n1:984:1262 [1] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA
n1:983:1261 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
n2:771:902 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/CUMEM
n1:983:1261 [0] NCCL INFO ncclCommInitRankConfig comm 0x557fe7 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 18000 commId 0x5ae77eb5ea4ec1ee - Init COMPLETE
"""  # noqa: E501
TCP = """\
NCCL version 2.21.5+cuda12.4
w1:73:356 [0] NCCL INFO NET/IB : No device found.
w1:73:356 [0] NCCL INFO NET/Socket : Using [0]eth0:10.244.1.7<0>
w1:73:356 [0] NCCL INFO Using network Socket
w1:73:356 [0] NCCL INFO comm 0x56340ebcd160 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
w1:73:356 [0] NCCL INFO Channel 00/02 :    0   1   2   3
w1:73:356 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
w1:73:356 [0] NCCL INFO Channel 01/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
w1:73:356 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
w1:73:356 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
w1:74:357 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
w1:74:357 [1] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/Socket/0
w2:74:357 [1] NCCL INFO Channel 00 : 2[0] -> 3[1] via SHM/direct/direct
w2:74:357 [1] NCCL INFO Channel 01 : 2[0] -> 3[1] via SHM/direct/direct
w1:73:356 [0] NCCL INFO Connected all rings
"""
SHARED_MEMORY = """\
n1:41:57 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1
n1:41:57 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct
n1:42:58 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via SHM/direct/direct
"""
OLD = """\
n1:2771:2771 [0] NCCL INFO Bootstrap : Using [0]eno1:192.168.50.11<0>
NCCL version 2.4.8+cuda10.0
n1:2771:2801 [0] NCCL INFO Channel 00 :    0   1
n1:2771:2801 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/Socket/0
n1:2771:2801 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0
n1:2771:2801 [0] NCCL INFO comm 0x7f3fd4001980 rank 0 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
n2:2771:2801 [0] NCCL INFO Ring 00 : 1 -> 0 [send] via NET/Socket/0
n2:2771:2801 [0] NCCL INFO comm 0x7f3fd4001980 rank 1 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
"""
