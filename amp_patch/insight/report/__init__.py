"""Makes an HTML page of a recording. The page needs no other file, no network and no library.

Nothing here imports torch.
"""

from .charts import Series as Series
from .charts import draw_figure as draw_figure
from .markup import Markup as Markup
from .markup import break_names as break_names
from .markup import element as element
from .markup import keep_words as keep_words
from .page import make_page as make_page
from .page import make_report as make_report
from .page import write_report as write_report
