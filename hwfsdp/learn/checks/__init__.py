"""The checks of the exercises, a module for each: `01_shard_math` is graded by `checks.shard_math`.

Each module has `CHECKS`; before them the judges, which run where the grades are made; before those the probes, which run on
ranks with a learner's functions in the package.
"""
