"""Data files of other libraries: HDF5, Zarr, safetensors, Parquet, WebDataset, Hugging Face."""
