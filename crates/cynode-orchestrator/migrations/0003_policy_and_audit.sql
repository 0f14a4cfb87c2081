-- Who may do what. The number rises with every change of any document; orchestrators compare it with what they hold.
create table policies (
    id text primary key,
    text text not null,
    revision bigint not null,
    -- As it came with the system: a newer version of the system replaces it.
    is_default boolean not null default false,
    updated_at timestamptz not null default now(),
    updated_by text not null
);

-- Every version that ever counted; without a text, that it was removed.
create table policy_versions (
    policy_id text not null,
    revision bigint not null,
    text text,
    created_at timestamptz not null default now(),
    created_by text not null,
    primary key (policy_id, revision)
);

create table policy_head (
    one boolean primary key default true check (one),
    revision bigint not null
);
insert into policy_head (revision) values (0);

-- Who writes to the audit trail: one row for each start of a writer. Records of a stream are numbered without gaps, and each
-- holds the hash of the one before it.
create table audit_streams (
    stream uuid primary key,
    writer text not null,
    opened_at timestamptz not null default now(),
    -- Where it stands.
    seq bigint not null default 0,
    hash bytea not null,
    -- No call that begins before this record is open.
    open_from bigint not null default 1,
    seen_at timestamptz not null default now(),
    -- Nobody writes to it any more.
    closed_at timestamptz,
    -- And every call in it has its outcome.
    settled_at timestamptz,
    lease_until timestamptz not null default now()
);
create index on audit_streams (seen_at) where settled_at is null;

-- The row is locked by whoever adds records until they are committed: cursors rise without gaps.
create table audit_head (
    one boolean primary key default true check (one),
    last bigint not null,
    -- How many records retention has removed.
    truncated bigint not null default 0
);
insert into audit_head (last) values (0);

-- Up to which event the trail tells what happened. What was before the trail is not in it.
create table audit_pump (
    one boolean primary key default true check (one),
    event_cursor bigint not null
);
insert into audit_pump (event_cursor) select last from event_head;

-- The columns that are generated can't say anything else than the body does.
create table audit_events (
    cursor bigint primary key,
    stream uuid not null,
    seq bigint not null,
    at timestamptz not null,
    body jsonb not null,
    hash bytea not null,
    kind text not null generated always as (body ->> 'kind') stored,
    action text generated always as (body ->> 'action') stored,
    call_id uuid generated always as ((body ->> 'call_id')::uuid) stored,
    subject text generated always as (body #>> '{subject,name}') stored,
    project_id uuid generated always as ((body ->> 'project_id')::uuid) stored,
    task_id uuid generated always as ((body ->> 'task_id')::uuid) stored,
    session_id uuid generated always as ((body ->> 'session_id')::uuid) stored,
    job_id uuid generated always as ((body ->> 'job_id')::uuid) stored,
    decision text generated always as (body ->> 'decision') stored,
    unique (stream, seq)
);
create index on audit_events (call_id);
-- Whoever closes a call, and however many try: it has one outcome.
create unique index on audit_events (call_id) where kind = 'outcome';
create index on audit_events (session_id, cursor) where session_id is not null;
create index on audit_events (job_id, cursor) where job_id is not null;
create index on audit_events (task_id, cursor) where task_id is not null;
create index on audit_events (decision, cursor) where decision = 'deny';
create index on audit_events using brin (at);

-- Signed words on where the streams stood. The same lines are in a file of each orchestrator.
create table audit_checkpoints (
    number bigint primary key,
    line text not null
);

-- What the last of them say of each stream.
create table audit_signed (
    stream uuid primary key,
    seq bigint not null
);

-- Commands that go on after the call that began them was answered, until it is known how they ended.
create table execs (
    exec_id uuid primary key,
    session_id uuid not null references sessions (session_id),
    call_id uuid not null,
    state text not null check (state in ('running', 'exited', 'lost')),
    exit jsonb,
    created_by text not null,
    created_at timestamptz not null default now(),
    ended_at timestamptz,
    lease_until timestamptz not null default now()
);
create index on execs (session_id);
create index on execs (lease_until) where state = 'running';
