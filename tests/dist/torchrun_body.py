"""Run by torchrun in test_island.py: one line per rank."""

from diloco_cli.config.schema import IslandConfig
from diloco_cli.train.island import Island

island = Island(IslandConfig(nproc_per_node=2), timeout_s=30)
plan = island.broadcast_plan([7, 11] if island.is_main else None)
total = int(island.all_reduce_sum(island.rank)[0])
print(f"{island.rank}/{island.world_size}:[{','.join(map(str, plan))}]:{total}", flush=True)
island.close()
