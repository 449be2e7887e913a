"""Put the sources of the kernels into the wheel; all else stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}


class BuildWithKernels(build_py):
    """Copies `kernels/` to `minivllm/kernels/`, where an installation looks for it."""

    def run(self) -> None:
        """Build the package, then add the sources."""
        super().run()
        if self.editable_mode:
            return  # a checkout has them beside the package
        target = Path(self.build_lib) / "minivllm" / "kernels"
        for source in sorted(Path("kernels").rglob("*")):
            if source.suffix in SUFFIXES:
                copy = target / source.relative_to("kernels")
                self.mkpath(str(copy.parent))
                self.copy_file(str(source), str(copy))


setup(cmdclass={"build_py": BuildWithKernels})
