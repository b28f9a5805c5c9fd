"""Checks of a user's own pipeline: does a resumed run deliver what the uninterrupted one would have?"""

from energon_bridge.verify.resume import ResumeReport as ResumeReport, verify_resume as verify_resume

__all__ = ["ResumeReport", "verify_resume"]
