"""Speed and memory, always as ratios within one run: machines differ, and one machine differs from hour to hour.

    python -m benchmarks            what `make bench` runs: all parts except `gpu`, `grading` and `profile`
    python -m benchmarks --help     the parts by name, and the options

To understand the measurements, read in this order:

    records      the fields of a result: values, checks against targets; the file of results
    timing       contenders take turns, so that a slow minute slows them all down
    contenders   the same model, wrapped by each library
    steps        forward + backward, and full steps
    limit        limits for every schedule: compute alone, the collectives alone; the floor: compute and one pass over each byte
    scaling      how the cost grows with layers, parameters, groups, ranks
    fake         one process plays many ranks
    overhead     Python time of the framework itself
    recording    the cost of recording
    peak         the most bytes alive at once
    gpu          one CUDA device: time, issue time, memory
    profile      where the time of a step goes
    startup      imports, and the start of ranks
    report       tables
    figure       one picture
"""
