"""Test support, not product code: a stub for torchvision, whose wheel does not load with a CPU torch.

sglang and transformers import names from it; for a Qwen nothing of it is ever called. So every submodule can
be imported, every attribute of one is a class, and every attribute of that is a string.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0"


class AnyClass(type):
    """The type of classes that have every attribute, as the members of an enum would be."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class AnyModule(types.ModuleType):
    """A module that has every attribute, each a class."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"torchvision.{name}")
