"""How fast bytes go from rank 0 to rank 1 through the package's wire; run on two hosts.

usage: link_speed.py FILE MEGABYTES
"""

import json
import sys
import time

import torch
import torch.distributed as dist

from megatron_dcp.dist import DataWorld


def main() -> None:
    dist.init_process_group("gloo")
    world = DataWorld(timeout_s=60)
    size = int(float(sys.argv[2]) * 1e6)
    for count in (1000, size):  # the first opens the connection
        world.rendezvous(0, 2)
        begin = time.perf_counter()
        data = torch.ones(count, dtype=torch.uint8)
        if world.rank == 0:
            world.wire.start_exchange([(data, 1)], [], world.group, "exchange").wait()
        else:
            data.zero_()
            world.wire.start_exchange([], [(data, 0)], world.group, "exchange").wait()
            assert bool((data == 1).all())
        world.rendezvous(0, 2)
        seconds = time.perf_counter() - begin
    if world.rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({"bytes": size, "seconds": seconds}, file)
        print("measured", flush=True)
    world.close()
    dist.destroy_process_group()


main()
