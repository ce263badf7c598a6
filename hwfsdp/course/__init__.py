"""The course: stations, electives, homework and lab, and what grades them.

    What an exercise is
    holes           functions cut out of a module, and put back
    provided        the names that a hole may use
    starters        what a student opens
    refusals        what the system refuses, told
    manifest        what an exercise is, and where its files are
    workbook        starters and solutions, written and compared
    cuts            three ways to say which rows a rank holds
    lesson          what notebooks need
    pictures        the pictures of exercises
    gallery         one picture of every kind, for docs/pictures.md

    How an answer runs
    overlay         a package with holes, and a learner's functions in them
    rules           what no answer needs, found in its text
    trust           whose code a frame runs
    doors           what a learner's code gets when it reaches for something
    guard           what it reaches for that it may not
    landlock        a process gives up the file system
    privileges      another user, no network
    processes       limits, and an end to all that is left behind
    confinement     all of these, for one rank
    oracles         what a rank has of the checks
    packing         data on the way to the process that grades
    run             ranks that run a learner's code

    How it is judged
    verdict         why a check fails, what a grade is
    submission      what was handed in
    misconceptions  what learners get wrong
    findings        what judges say, as data
    diagnose        from a number to the misconception behind it
    grade           checks of an exercise against an answer
    checklist       the checks as data, in the order in which they run
    checks          of the electives
    stations        of `my_fsdp.py`, and its reference
    capstone        of the homework
    lab             of the broken scripts

    What students and instructors call
    report          grades as text
    pages           HTML from templates
    progress        how far a learner is
    certificate     what they take home
    filemap         a map of their `my_fsdp.py`
    commands        list, hint, status, reset, catchup
    checking        check, watch
    beside          a failed run beside the reference's, as a page
    replay          an answer beside the reference
    gradebook       a class graded
    release         the student's edition
    mutants         machine-made mistakes
    grader_report   how many of them the checks notice: docs/grading.md

A learner's code runs in processes of ranks only, never where a grade is made.
"""

NEEDED_BY_RANKS = "hwfsdp.course.stations.course"  # with all that it imports: what a graded rank needs
