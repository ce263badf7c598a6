"""What happened: events of a step, the bytes behind them, and what follows from both.

    What is written down
    memory           what is alive, by kind, read from the storages themselves
    places           where in the program an event was issued
    events           what happened, when, on which stream
    validate         values that a file says, checked before use
    clocks           whose time a log is in, and one axis for several
    accounting       what a step costs, before it is run: bytes in closed form
    run_info         what a log says of the run it is of

    A log
    lifetimes        when each parameter group was sharded, gathered, whole, freed
    races            what is certain to be over before what, and where it is not
    perfetto         an event log as a file that ui.perfetto.dev opens
    eventlog         a finished recording: questions about it, and its file

    A recording
    hooks            hooks on all storages and optimizers
    collectives      collectives of torch.distributed, seen where they are called
    functional       functional collectives, seen at their operators
    stream_clocks    what time it is on a stream
    instrument       what a recording hears from the heart
    recording        puts the instruments in place, takes them away again
    onlooker         tells a recording of modules that have no instruments

    What a log shows
    tables           how text is laid out
    findings         what moved, what should have, what was hidden, who was late
    findings_text    findings as text and JSON
    comparison       two logs side by side, as text and JSON

Nothing here changes what a step computes.
"""
