"""Makes each repeated run of a script write to a folder of its own, so that runs do not change the user's files.

A run still sees the user's files, except where it has written or removed one itself. Shared folders, such as caches,
are read and written in place. This subpackage does not import torch.
"""

from .folders import Folders as Folders
from .folders import find_inductor_cache as find_inductor_cache
from .folders import find_shared as find_shared
from .guard import NotRedirectedError as NotRedirectedError
from .redirect import redirect as redirect
