-- A job was stopped on that node, because it had gone elsewhere: there it counts as ended.
alter table job_leftovers add column stopped boolean not null default false;

-- An end that was asked for while the node was away.
create index on sessions (lease_until) where ending is not null;

-- The key that all orchestrators of this database share, as far as it can be told without giving it away.
create table cluster (
    one boolean primary key default true check (one),
    key_fingerprint text not null
);
