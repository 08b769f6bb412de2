"""Process groups of a job, by role.

The doors are ``build.build_process_groups`` and ``process_groups.ProcessGroups``.
"""
