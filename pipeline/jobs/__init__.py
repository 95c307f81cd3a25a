"""Run plans: graphs of stages.

``plan.py`` reads a plan and resolves its settings (``plan_expansion.py`` expands its defaults and
matrices), ``freshness.py`` decides which stages must run, ``runner.py`` runs them, and
``launch.py`` starts the processes of a stage.

On a cluster, ``submission.py`` submits a job per stage with the resources that ``site.py`` derives.
``sbatch.py`` writes its line, and ``slurm_commands.py`` asks SLURM about jobs. ``inside_job.py``
runs in a job, ``job_endings.py`` records and judges how its ranks end, and ``job_status.py`` shows
all of it.
"""
