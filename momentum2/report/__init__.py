"""Run directories to one HTML page: look instead of read."""

from momentum2.report.learned import ReportOptions
from momentum2.report.page import write_last_report, write_report
from momentum2.report.watch import watch

__all__ = ["ReportOptions", "watch", "write_last_report", "write_report"]
