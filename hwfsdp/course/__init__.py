"""The course's kit: an exercise is a file that a student writes, and a pytest file that judges it. This package is what both need.

    A run
    plugin        markers, fixtures, options; what pytest prints
    ranks         the student's file on ranks: questions, launches, answers
    probing       the side of a rank: load the file, call probes, write reports
    packing       numbers and tensors as bytes, between processes
    failures      what a rank raised, in the course's words
    walls         what the operating system takes away from the file
    rules         what the file's text may say

    What is observed, and what must hold
    scenarios     models that break naive files
    facts         what a rank observes of training
    watching      operators, memory and traffic of a rank
    laws          what must hold of facts
    machines      a step on simulated GPUs
    timing        what must hold of such a step
    findings      a failure with its misconception; which of several is the cause
    pages         findings as text

    Exercises
    stages        marks in solutions → starters, stages, solutions
    exercises     the list of exercises, read from their tests
    lab           the broken scripts: bugs, answers, judgement
    lab_runs      the broken scripts under the recorder
    lesson        helpers of the notebooks

    Commands
    commands      list, check, hint, status, watch, reset, catchup; what to do next
    progress      what has passed
    compare       the page "yours beside the reference"
    release       the student's edition
    text          what commands print

    A class
    gradebook     hwfsdp grade
    submissions   find and unpack submissions
    pool          runs of pytest, several at once
    results       outcomes of a class
    copies        what a file shares with the reference or with another file
    formats       CSV, JSON, HTML, Gradescope, Classroom 50, PrairieLearn

A student's file runs only in processes of ranks, never in the process that makes a mark.
"""
