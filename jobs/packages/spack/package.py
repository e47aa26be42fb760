# A Spack recipe. summit_train is in no index yet: make its sdist (`python -m build --sdist` in the checkout), then
#
#   spack repo create ~/spack-own own && mkdir -p ~/spack-own/packages/py_summit_train
#   cp package.py ~/spack-own/packages/py_summit_train/ && spack repo add ~/spack-own
#
# (`spack repo create` prints the folder that it made; before Spack 1.0 the package's folder is py-summit-train, and
# PythonPackage comes from spack.package too.) Put the sdist's path into `url` and its sha256 into `version`.
# Ranks communicate through torch.distributed: py-torch needs +distributed, which is its default.
from spack.package import depends_on, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PySummitTrain(PythonPackage):
    """Train video recognition networks on any number of GPUs, over Horovod or torch.distributed."""

    url = "file:///path/to/summit_train-0.3.0.tar.gz"

    version("0.3.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@64:", type="build")

    depends_on("py-av@17.1:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-matplotlib@3.9:", type=("build", "run"))
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-pillow@11:", type=("build", "run"))
    depends_on("py-pydantic@2.10:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:6.0.3,6.0.5:", type=("build", "run"))
    depends_on("py-rich@13.9:", type=("build", "run"))
    depends_on("py-tensorboard@2.18:", type=("build", "run"))
    depends_on("py-torch@2.7:", type=("build", "run"))
