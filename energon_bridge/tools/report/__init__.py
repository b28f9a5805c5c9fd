"""The report of a run, a page in HTML: what was delivered, losses, waiting, failures.

It imports the core, trainers and `preview/`. Begin with `callback`, which does all of it under Lightning: `recorder`
collects during the run and decides what is kept, `page` writes the page at its end.
"""
