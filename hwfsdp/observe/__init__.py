"""Recordings of training steps: events, bytes, and tools that examine both.

    Data
    memory           the bytes alive by kind, read from the storages themselves
    places           where in the program an event was issued
    events           the event log: each event with its time and its stream
    validate         checks of values read from a file
    clocks           clocks of ranks, and one time axis for all of them
    intervals        sets of times
    accounting       the bytes of a step by closed forms, before the step runs
    run_info         the description of a run inside its log

    A log
    races            accesses to the same memory whose order is not certain
    lifetimes        when each parameter group was sharded, gathered, whole, freed
    perfetto         an event log as a file that ui.perfetto.dev opens
    eventlog         a finished recording: questions about it, and its file

    A recording
    hooks            hooks on all storages and optimizers
    collectives      wrappers that log the collectives of torch.distributed
    functional       wrappers that log functional collectives
    stream_clocks    the clock of each set of streams
    instrument       reports from the core to a recording
    recording        puts the instruments in place, and removes them again
    onlooker         reports on modules that have no instruments

    Reports on a log
    tables           text in columns
    findings         a log in numbers: traffic, closed forms, overlap, stragglers
    findings_text    findings as text and JSON
    comparison       two logs side by side, as text and JSON

Nothing here changes the results of a step.
"""
