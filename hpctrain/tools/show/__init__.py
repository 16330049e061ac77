"""Tables, plots and live views of the tools, in one style."""
