"""Checks a training against a contract: a file that says which op runs in which precision, and which losses, norms and
outputs the training had. A promised number has a band: by how much a later run may differ.

Importing this does not import torch.
"""

from .contract import Contract as Contract
from .difference_text import describe_files as describe_files
from .measure import Measurer as Measurer
from .op_differences import OpDifferences as OpDifferences
from .op_differences import find_differences as find_differences
from .op_differences import read_ops as read_ops
from .page import write_page as write_page
from .question import Question as Question
from .text import describe_contract as describe_contract
from .text import format_verdict as format_verdict
from .verdict import Break as Break
from .verdict import Verdict as Verdict
from .verdict import is_other_script as is_other_script
from .verdict import judge as judge
