"""Recordings of training steps: events, bytes, and tools that examine both.

    Data
    ledger            the bytes alive by kind, read from the storages themselves
    call_sites        where in the program an event was issued
    events            the event log: each event with its time and its stream
    validate          checks of values read from a file
    tables            text in columns
    clocks            the clock of each set of streams, and one time axis for all ranks
    accounting        the bytes of a step by closed forms, before the step runs
    run_info          the description of a run inside its log

    A log
    races             accesses to the same memory whose order is not certain
    group_states      when each parameter group was sharded, gathered, whole, freed
    perfetto          an event log as a file that ui.perfetto.dev opens
    step_times        sets of times; the time of each step, and the communication that it did not hide
    eventlog          a finished recording: questions about it, and its file
    analysis          a log in numbers; two logs side by side
    log_report        an analysis and a comparison as text and JSON

    A recording
    collective_calls  wrappers that log the collectives of torch.distributed, and functional ones
    instrument        reports from the core to a recording
    recording         puts the instruments in place, and removes them again
    module_hooks      reports on modules that have no instruments

Nothing here changes the results of a step.
"""
