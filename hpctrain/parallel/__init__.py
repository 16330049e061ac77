"""Models split over the ranks of a mesh; today along the layers, in pipelines."""
