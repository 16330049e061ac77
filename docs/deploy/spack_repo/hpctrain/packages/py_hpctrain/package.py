# A Spack package of hpctrain: parsed by a test, not built (Spack >= 1.0 is needed).
#   make dist HPCTRAIN_URL=https://HOST/OWNER/hpctrain                  (in the checkout)
#   spack repo add docs/deploy/spack_repo/hpctrain
#   spack install --no-checksum py-hpctrain +report ^openmpi
# torch, MLflow and CuPy are left to pip in a virtual environment: in July 2026 Spack lacked the
# versions or packages that these extras need.

from pathlib import Path

from spack.package import default_args, depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpctrain(PythonPackage):
    """Train neural networks over MPI with hand-written all-reduce, and measure how that scales."""

    # On no package index yet: `make dist` writes the archive.
    url = f"file://{Path(__file__).parents[6]}/dist/hpctrain-0.1.0.tar.gz"

    license("Apache-2.0", checked_by="hpctrain")

    version("0.1.0")

    variant("hdf5", default=False, description="Data in HDF5")
    variant("parquet", default=False, description="Data in Parquet")
    variant("webdataset", default=False, description="Data in WebDataset shards")
    variant("zarr", default=False, description="Data in Zarr")
    variant("huggingface", default=False, description="Data sets of Hugging Face")
    variant("jax", default=False, description="Functions of JAX under every engine")
    variant("tensorboard", default=False, description="Metrics to TensorBoard")
    variant("wandb", default=False, description="Metrics to Weights & Biases")
    variant("report", default=False, description="Reports and plots")

    depends_on("py-hatchling@1.27:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-annotated-types@0.6:")
        depends_on("py-click@8.1:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@1.26:")
        depends_on("py-pydantic@2.8:")
        depends_on("py-rich@13.7:")
        depends_on("py-safetensors@0.4:")
        depends_on("py-threadpoolctl@3.1:")
        depends_on("py-tomli@2.0:", when="^python@:3.10")
        depends_on("py-tomli-w@1.0:")
        depends_on("py-typing-extensions@4.6.1:")

        depends_on("py-h5py@3.10:", when="+hdf5")
        depends_on("py-pyarrow@15.0:", when="+parquet")
        depends_on("py-webdataset@0.2.86:", when="+webdataset")
        depends_on("py-pillow@10.0:", when="+webdataset")
        depends_on("py-zarr@2.18:", when="+zarr")
        depends_on("py-datasets@3.0:", when="+huggingface")
        depends_on("py-pillow@10.0:", when="+huggingface")
        depends_on("py-jax@0.4.30:", when="+jax")
        depends_on("py-tensorboard@2.18:", when="+tensorboard")
        depends_on("py-wandb@0.20:", when="+wandb")
        depends_on("py-jinja2@3.1:", when="+report")
        depends_on("py-matplotlib@3.8:", when="+report")
