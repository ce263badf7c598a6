"""Speed and memory, always as ratios within one run: machines differ, and the same machine differs from hour to hour.

    python -m benchmarks            what `make bench` runs: all parts but `gpu` and `profile`
    python -m benchmarks --help     the parts by name, and what can be chosen

To read how it measures, in this order:

    records      what a result is: values, checks against targets, one file
    timing       contenders take turns, so that a slow minute hurts all of them
    contenders   the same model, wrapped by each library
    steps        forward + backward, and full steps
    limit        what no schedule can beat: compute alone, the collectives alone
    scaling      how the cost grows with layers, parameters, groups, ranks
    fake         many ranks played by one process
    overhead     Python time of the framework itself
    recording    what recording costs
    peak         the most bytes alive at once
    gpu          one CUDA device: time, issue time, memory
    profile      where the time of a step goes
    startup      imports, and the start of ranks
    report       tables
    figure       one picture
"""
