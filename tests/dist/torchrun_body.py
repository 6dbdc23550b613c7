"""Run by torchrun in test_island.py: one line per rank."""

import os

from diloco_cli.config.schema import IslandConfig
from diloco_cli.train.island import Island

island = Island(IslandConfig(nproc_per_node=2), timeout_s=30)
plan = island.broadcast_plan([7, 11] if island.is_main else None)
total = int(island.all_reduce_sum(island.rank)[0])
# One write, newline and all: print makes two of them, and the ranks' then mix in the pipe that they share.
os.write(1, f"{island.rank}/{island.world_size}:[{','.join(map(str, plan))}]:{total}\n".encode())
island.close()
