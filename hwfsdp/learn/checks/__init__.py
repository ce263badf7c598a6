"""The checks of the electives, a module for each: `12_strided_shards` is graded by `checks.strided_shards`.

Each module has `CHECKS`; before them the judges, which run where the grades are made; before those the probes, which run on
ranks with a learner's functions in the package.
"""
