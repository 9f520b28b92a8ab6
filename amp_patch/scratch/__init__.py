"""Lets reruns of a script write to a folder of their own, over the files from before. Imports no torch."""

from .folders import Folders as Folders
from .folders import find_inductor_cache as find_inductor_cache
from .folders import find_shared as find_shared
from .guard import NotRedirectedError as NotRedirectedError
from .redirect import redirect as redirect
