"""The course: stations, electives, homework and lab, and the code that grades them.

    What an exercise is
    holes           cut functions out of a module and put them back
    provided        the names that a hole may use
    starters        the files that a student opens
    refusals        error messages for users
    manifest        the data of an exercise, and the places of its files
    workbook        write and compare starters and solutions
    cuts            three ways to compute which rows a rank holds
    lesson          helpers for notebooks
    pictures        the pictures of exercises

    How an answer runs
    overlay         load the package with a learner's functions in its holes
    rules           find forbidden code in the text of an answer
    trust           find out who wrote the code that a frame runs
    doors           check each attribute that a learner's code reads or sets
    lookups         check each attribute that a library looks up for a learner
    guard           detect forbidden access while a learner's code runs
    landlock        take the file system away from a process
    privileges      change the user, remove the network
    processes       limit processes, and kill all that are left
    confinement     all of these limits, for one rank
    oracles         the part of the checks that a rank sees
    wire            everything that a rank sends and receives
    packing         data for the process that grades
    run             ranks that run a learner's code

    How it is judged
    verdict         findings, results of checks, and grades
    submission      find and read the files of a learner
    misconceptions  the mistakes of learners
    findings        the sentences of judges, as data
    diagnose        from a number to the misconception behind it
    grade           run the checks of an exercise on an answer
    checklist       the checks as data, in the order in which they run
    checks          checks of the electives
    stations        checks of `my_fsdp.py`, and its reference
    capstone        checks of the homework
    lab             checks of the broken scripts

    What students and instructors call
    report          grades as text
    pages           HTML from templates
    progress        the progress of a learner
    certificate     the certificate after station 10
    filemap         a map of the learner's `my_fsdp.py`
    commands        list, hint, status, reset, catchup
    checking        check, watch
    beside          a page with a failed run beside the reference's run
    replay          an answer beside the reference
    gradebook       grade a class
    release         the student's edition
    mutants         machine-made mistakes
    grader_report   how many of them the checks notice: docs/grading.md

A learner's code runs only in processes of ranks. It never runs in the process that makes a grade.
"""

NEEDED_BY_RANKS = "hwfsdp.course.stations.course"  # a graded rank needs this module and all its imports
