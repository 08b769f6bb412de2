"""Build the process groups of a job.

The door is ``build.build_process_groups``.
"""
