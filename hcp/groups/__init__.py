"""Build the process groups of a job.

The doors are ``build.build_process_groups`` and ``process_groups.ProcessGroups``.
"""
