"""Pipeline parallelism: lists of actions per rank, checks, clocks and cuts of a model."""
