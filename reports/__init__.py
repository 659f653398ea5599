"""Tables and charts of a study as one offline HTML page. No arrays, no models."""

from .report import report as report
from .report import report_is_current as report_is_current
