-- What is kept of a job's output counts in quotas until it expires: the bytes of the blob and of the streams in the object.
-- Of output from before this nobody wrote down how large it is: that is looked up by and by.
alter table jobs add column output_bytes bigint not null default 0;
