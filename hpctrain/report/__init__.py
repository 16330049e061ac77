"""What became of a run, to look at: plots and one page; reads files only."""
