"""Run plans: graphs of stages.

``plan.py`` reads a plan and lays it out in a directory (``plan_expansion.py`` expands its defaults
and matrices), ``freshness.py`` decides which stages must run, ``runner.py`` runs them, and
``launch.py`` starts the processes of a stage. On a cluster, ``submission.py`` submits a job per
stage with the resources that ``site.py`` derives, through ``scheduler.py``, which writes the line
of sbatch. ``slurm_job.py`` is the job, ``job_endings.py`` records and judges how it ends, and
``job_status.py`` shows all of it.
"""
