# shellcheck shell=bash
# Settings of a job on Ethernet, or on one node. A job script sources this once, before it starts
# ranks:
#     cores_per_rank=8; source jobscripts/env/ethernet.sh
# Settings of the caller are kept.
cores_per_rank=${cores_per_rank:-1}

# NCCL would look for InfiniBand, and for first contact take the first interface with an address:
# never loopback or a container's bridge. Check: NCCL_DEBUG=INFO prints "NET/Socket : Using".
export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,virbr}

# MPI selects the interfaces that connect the nodes. Where a node has
# some that lead nowhere, name the network: OMPI_MCA_btl_tcp_if_include=10.1.0.0/16 (Open MPI),
# UCX_NET_DEVICES=eth0 (UCX). Check: a start that hangs, or "connection refused" between nodes.

# One core of each rank is left to hpcdist, which moves data while the program computes, and OpenMP
# leaves the binding to the launcher. Check: taskset -cp $$ in a rank, torch.get_num_threads().
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores_per_rank > 1 ? cores_per_rank - 1 : 1))}
export OMP_PROC_BIND=${OMP_PROC_BIND:-false}
