-- Credentials of upstream services: sealed to the public key of the role that uses them. Nobody else can open them.
create table credentials (
    id uuid primary key,
    project_id uuid not null references projects (id),
    name text not null,
    role text not null,
    url text not null,
    username text not null,
    key_id text not null,
    encapsulated bytea not null,
    ciphertext bytea not null,
    -- Keyed hashes of the value, encrypted: what enters a sandbox is searched for it.
    held bytea not null,
    created_by text not null,
    created_at timestamptz not null default now(),
    rotated_at timestamptz not null default now(),
    disabled_at timestamptz,
    unique (project_id, name)
);

create table repositories (
    id uuid primary key,
    project_id uuid not null references projects (id),
    name text not null,
    credential_id uuid references credentials (id),
    -- The repository as it was registered.
    object jsonb not null,
    revision bigint not null,
    created_by text not null,
    created_at timestamptz not null default now(),
    unique (project_id, name)
);

-- Rises with every change of credentials and repositories, as the revision of the policies does with theirs.
create table egress_head (
    singleton boolean primary key default true check (singleton),
    revision bigint not null
);
insert into egress_head (revision) values (0);

-- Seeds of workspaces in the store, so that the same commit is not built twice.
create table git_seeds (
    repository_id uuid not null references repositories (id) on delete cascade,
    -- The nil UUID without a credential.
    credential_id uuid not null,
    reference text not null,
    commit text not null,
    -- 0 for the whole history.
    depth bigint not null,
    -- How shapes of secrets were treated when it was scanned.
    shapes text not null,
    sha256 text not null,
    size bigint not null,
    notes jsonb not null,
    flagged jsonb not null,
    created_at timestamptz not null default now(),
    used_at timestamptz not null default now(),
    primary key (repository_id, credential_id, reference, commit, depth, shapes)
);
create index on git_seeds (sha256);

-- Where a session's workspace comes from, and what an artifact was exported from.
alter table sessions add column source jsonb;
alter table artifacts add column session_id uuid, add column base_commit text;

create table promotions (
    id uuid primary key,
    task_id uuid not null references tasks (id),
    repository_id uuid not null,
    changeset uuid not null,
    branch text not null,
    state text not null
        check (state in ('working', 'checking', 'awaiting_approval', 'done', 'failed', 'rejected', 'canceled')),
    -- Written by calls only: how far it should go, a person's decision, and who canceled it.
    until text not null check (until in ('applied', 'committed', 'pushed', 'opened')),
    decision jsonb,
    canceled_by text,
    -- Written by the reconciler that has the lease: the promotion as it is shown, and what only it needs.
    object jsonb not null,
    progress jsonb not null,
    attempts integer not null default 0,
    -- A call has changed something since the lease began.
    woken boolean not null default false,
    due_at timestamptz not null default now(),
    lease_until timestamptz not null default to_timestamp(0),
    owner_id uuid not null references users (id),
    created_by text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    unique (task_id, repository_id, changeset, branch)
);
create index on promotions (due_at) where state in ('working', 'checking', 'awaiting_approval');
create index on promotions (repository_id) where state in ('working', 'checking', 'awaiting_approval');
