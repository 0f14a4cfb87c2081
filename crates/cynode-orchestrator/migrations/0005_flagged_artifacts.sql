-- What an artifact holds that looks like a credential: paths and shapes, never values. Promotion asks for it.
alter table artifacts add column flagged jsonb;
