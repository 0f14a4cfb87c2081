-- Specifications of SBA jobs that have not been acknowledged. They may be large, so they are not in the rows of jobs, which are read at every step.
create table job_specs (
    job_id uuid primary key references jobs (job_id),
    -- JSON.
    spec text not null
);

-- The result of an SBA job is a blob. What it says in short outlives it: its hash and size, the numbers of steps, the failure code.
alter table jobs add column result_sha256 text;
alter table jobs add column result_summary jsonb;
alter table jobs add column late_result_sha256 text;
create index on jobs (result_sha256) where result_sha256 is not null;
create index on jobs (late_result_sha256) where late_result_sha256 is not null;

alter table events add column failure_code text;
