-- How far a running job is, as its last event said, and when. `job.progress` events are rare: this decides whether another one is due.
alter table jobs add column progress jsonb;
alter table jobs add column progress_at timestamptz;

alter table events add column progress jsonb;
