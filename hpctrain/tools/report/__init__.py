"""Reports of runs: plots and one page, made from the files of a run alone."""
