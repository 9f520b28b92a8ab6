"""Makes repeated runs of a script write to a folder of their own, so that they change none of the user's files.

A run still sees the user's files, except where it has written or removed one itself. Imports no torch.
"""

from .folders import Folders as Folders
from .folders import find_inductor_cache as find_inductor_cache
from .folders import find_shared as find_shared
from .guard import NotRedirectedError as NotRedirectedError
from .redirect import redirect as redirect
