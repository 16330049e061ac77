"""Models split over the ranks of a mesh; today along the layers, in pipelines."""

from hpctrain.parallel.options import MeshOptions, PipelineOptions

__all__ = ["MeshOptions", "PipelineOptions"]
