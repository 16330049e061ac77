"""Tools above the library: benchmarks, preflight, reports, scaling studies, fault campaigns."""
