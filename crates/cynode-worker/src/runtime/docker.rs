//! Docker over its socket.
//!
//! Docker has one map of ids for the whole daemon (`userns-remap`) or none, so sandboxes share their owner on the host:
//! `ids` says which, and the worker asks for the operator's word before it goes on. What Docker would put into a sandbox
//! of the host (its resolver, its name) is covered with files of ours; what an image could set is set here.

use std::{collections::HashMap, path::PathBuf, time::Duration};

use async_trait::async_trait;
use bollard::{
    models::{
        ContainerCreateBody, HealthConfig, HostConfig, HostConfigCgroupnsModeEnum,
        HostConfigLogConfig, ImageConfig, Mount, MountBindOptions, MountBindOptionsPropagationEnum,
        MountTmpfsOptions, MountType, ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
        SystemInfo,
    },
    query_parameters::{
        CreateContainerOptions, CreateImageOptions, ListContainersOptions, RemoveImageOptions,
    },
};
use bytes::Bytes;
use cynode_api::LocalImage;
use futures_util::TryStreamExt as _;
use tokio::sync::OnceCell;

use super::{
    Container, Error, ExecSpec, IdMap, IdSpace, Image, Runtime, RuntimeExec, RuntimeExecState,
    Spec,
    compat::{self, translate},
    libpod, seccomp,
};

#[derive(Clone, Debug)]
pub struct DockerOptions {
    pub socket: PathBuf,
    /// Holds the files that every sandbox gets as `/etc/hosts` and the like.
    pub directory: PathBuf,
    /// The OCI runtime by the name that the daemon knows it by; its default when absent.
    pub oci_runtime: Option<String>,
    /// What a call may take; creation, which waits for others, twice that.
    pub call_limit: Duration,
}

#[derive(Debug)]
pub struct Docker {
    options: DockerOptions,
    client: OnceCell<bollard::Docker>,
    ids: OnceCell<IdSpace>,
}

/// What a sandbox sees instead of the host's own, which Docker would copy in.
const FILES: [(&str, &str); 3] = [
    ("hosts", "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost\n"),
    ("resolv.conf", ""),
    ("hostname", "sandbox\n"),
];

impl Docker {
    #[must_use]
    pub fn new(options: DockerOptions) -> Self {
        Self {
            options,
            client: OnceCell::new(),
            ids: OnceCell::new(),
        }
    }

    async fn client(&self) -> Result<bollard::Docker, Error> {
        let client = self.client.get_or_try_init(|| async {
            let client = compat::connect(&self.options.socket, self.options.call_limit)
                .await
                .map_err(|error| {
                    Error::Unavailable(format!(
                        "nothing answers as Docker on {}: {error}",
                        self.options.socket.display()
                    ))
                })?;
            self.write_files().map_err(|error| {
                Error::Unavailable(format!(
                    "preparing {}: {error}",
                    self.options.directory.display()
                ))
            })?;
            Ok(client)
        });
        client.await.cloned()
    }

    fn write_files(&self) -> std::io::Result<()> {
        fs_err::create_dir_all(&self.options.directory)?;
        for (name, text) in FILES {
            let path = self.options.directory.join(name);
            // Running sandboxes have it mounted, so one that is right is left alone.
            if fs_err::read_to_string(&path).ok().as_deref() != Some(text) {
                cynode_service::files::replace(&path, text.as_bytes())?;
            }
            fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        }
        Ok(())
    }

    /// Runs a call under its deadline.
    async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        run: impl FnOnce(bollard::Docker) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let started = std::time::Instant::now();
        let client = self.client().await?;
        let result = tokio::time::timeout(limit, run(client))
            .await
            .map_err(|_| Error::Timeout { call, limit })?;
        metrics::histogram!("cynode_runtime_call_seconds", "call" => call)
            .record(started.elapsed().as_secs_f64());
        result
    }

    /// What the daemon says of itself.
    pub(crate) async fn info(&self) -> Result<SystemInfo, Error> {
        self.call("info", self.options.call_limit, |client| async move {
            client.info().await.map_err(translate("info", "info"))
        })
        .await
    }

    /// Makes an image of one layer.
    pub(crate) async fn import(&self, repository: &str, layer: Bytes) -> Result<(), Error> {
        let options = CreateImageOptions {
            from_src: Some("-".to_owned()),
            repo: Some(repository.to_owned()),
            ..Default::default()
        };
        self.call("import", 2 * self.options.call_limit, |client| async move {
            let said: Vec<_> = client
                .create_image(Some(options), Some(bollard::body_full(layer)), None)
                .try_collect()
                .await
                .map_err(translate("import", repository))?;
            match said.into_iter().find_map(|info| info.error_detail) {
                Some(error) => Err(Error::Refused {
                    call: "import",
                    message: error.message.unwrap_or_default(),
                }),
                None => Ok(()),
            }
        })
        .await
    }

    pub(crate) async fn remove_image(&self, reference: &str) -> Result<(), Error> {
        let options = RemoveImageOptions {
            force: true,
            ..Default::default()
        };
        self.call(
            "remove_image",
            self.options.call_limit,
            |client| async move {
                client
                    .remove_image(reference, Some(options), None)
                    .await
                    .map(drop)
                    .map_err(translate("remove_image", reference))
            },
        )
        .await
    }

    fn create_body(&self, spec: &Spec, image: &ImageConfig) -> Result<ContainerCreateBody, Error> {
        // A name without a value takes the variable of that name away, which the image would otherwise add.
        let ours = |name: &str| spec.env.iter().any(|(own, _)| own == name);
        let images = image
            .env
            .iter()
            .flatten()
            .filter_map(|variable| variable.split('=').next())
            .filter(|name| !name.is_empty() && !ours(name));
        let env = spec
            .env
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .chain(images.map(str::to_owned))
            .collect();
        Ok(ContainerCreateBody {
            image: Some(spec.image_id.clone()),
            labels: Some(spec.labels.clone().into_iter().collect()),
            // All of it as the entrypoint: an empty one would let the image's in.
            entrypoint: Some(spec.argv.clone()),
            cmd: Some(Vec::new()),
            user: Some(compat::USER.to_owned()),
            env: Some(env),
            working_dir: Some("/".to_owned()),
            hostname: Some("sandbox".to_owned()),
            network_disabled: Some(true),
            healthcheck: Some(HealthConfig {
                test: Some(vec!["NONE".to_owned()]),
                ..Default::default()
            }),
            stop_signal: Some("SIGKILL".to_owned()),
            stop_timeout: Some(0),
            tty: Some(false),
            open_stdin: Some(false),
            host_config: Some(self.host_config(spec, image)?),
            ..Default::default()
        })
    }

    fn host_config(&self, spec: &Spec, image: &ImageConfig) -> Result<HostConfig, Error> {
        let limits = &spec.limits;
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let memory = Some(signed(limits.memory_bytes));
        let ulimit = |(name, value): (&str, u64)| ResourcesUlimits {
            name: Some(name.to_owned()),
            soft: Some(signed(value)),
            hard: Some(signed(value)),
        };
        let tmpfs =
            libpod::tmpfs_places(limits.memory_bytes)
                .into_iter()
                .map(|(target, bytes, exec)| {
                    (
                        target.to_owned(),
                        format!(
                            "size={bytes},mode=1777,nosuid,nodev,{}",
                            if exec { "exec" } else { "noexec" }
                        ),
                    )
                });
        Ok(HostConfig {
            network_mode: Some("none".to_owned()),
            ipc_mode: Some("none".to_owned()),
            cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
            privileged: Some(false),
            cap_drop: Some(vec!["ALL".to_owned()]),
            security_opt: Some(vec![
                "no-new-privileges".to_owned(),
                format!("seccomp={}", seccomp::PROFILE),
            ]),
            readonly_rootfs: Some(true),
            tmpfs: Some(tmpfs.collect()),
            mounts: Some(self.mounts(spec, image)?),
            memory,
            memory_swap: memory,
            pids_limit: Some(i64::from(limits.pids)),
            cpu_period: Some(signed(libpod::CPU_PERIOD)),
            cpu_quota: Some(signed(libpod::cpu_quota(limits.cpus))),
            ulimits: Some(libpod::rlimits(limits).into_iter().map(ulimit).collect()),
            log_config: Some(HostConfigLogConfig {
                typ: Some("none".to_owned()),
                config: Some(HashMap::new()),
            }),
            restart_policy: Some(RestartPolicy {
                name: Some(RestartPolicyNameEnum::NO),
                maximum_retry_count: None,
            }),
            auto_remove: Some(false),
            init: Some(false),
            runtime: self.options.oci_runtime.clone(),
            cgroup_parent: spec.cgroup_parent.clone(),
            oom_score_adj: Some(libpod::oom_score_adj().into()),
            ..Default::default()
        })
    }

    fn mounts(&self, spec: &Spec, image: &ImageConfig) -> Result<Vec<Mount>, Error> {
        let bind = |source: String, target: String, read_only: bool| Mount {
            typ: Some(MountType::BIND),
            source: Some(source),
            target: Some(target),
            read_only: Some(read_only),
            bind_options: Some(MountBindOptions {
                propagation: Some(MountBindOptionsPropagationEnum::PRIVATE),
                ..Default::default()
            }),
            ..Default::default()
        };
        let files = FILES.map(|(name, _)| {
            bind(
                self.options.directory.join(name).display().to_string(),
                format!("/etc/{name}"),
                true,
            )
        });
        let ours = spec.mounts.iter().map(|mount| {
            bind(
                mount.source.display().to_string(),
                mount.target.clone(),
                mount.read_only,
            )
        });
        let mut mounts: Vec<Mount> = files.into_iter().chain(ours).collect();
        // Docker makes a writable volume on the host's disk for each that an image declares, unless something is mounted
        // there. So there is: nothing, and not writable.
        for volume in image.volumes.iter().flatten() {
            let path = clean(volume);
            if let Some(mount) = spec.mounts.iter().find(|mount| {
                path.strip_prefix(&mount.target)
                    .is_some_and(|rest| rest.starts_with('/'))
            }) {
                // Its place would be made within the files of the host that are mounted there.
                return Err(Error::Refused {
                    call: "create",
                    message: format!("the image declares a volume {path} below {}", mount.target),
                });
            }
            if mounts
                .iter()
                .any(|mount| mount.target.as_deref() == Some(&path))
                || libpod::tmpfs_places(0)
                    .iter()
                    .any(|(target, ..)| *target == path)
            {
                continue;
            }
            mounts.push(Mount {
                typ: Some(MountType::TMPFS),
                target: Some(path),
                read_only: Some(true),
                tmpfs_options: Some(MountTmpfsOptions {
                    size_bytes: Some(4_096),
                    mode: Some(0o755),
                    options: None,
                }),
                ..Default::default()
            });
        }
        Ok(mounts)
    }
}

/// An absolute path without `.`, `..` and doubled slashes, as Docker makes it.
fn clean(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The daemon's map of ids. Its root directory ends in the ids that stand for root inside, which it can't be told to hide.
pub(crate) fn id_space(info: &SystemInfo) -> Result<IdSpace, String> {
    let option = |name: &str| {
        info.security_options
            .iter()
            .flatten()
            .any(|option| option.split(',').any(|part| part == format!("name={name}")))
    };
    if option("rootless") {
        return Err(
            "the daemon runs without root, which is not supported: use Podman for that".to_owned(),
        );
    }
    if !option("userns") {
        return Ok(IdSpace::Host);
    }
    let root = info.docker_root_dir.as_deref().unwrap_or_default();
    let ids = root
        .rsplit('/')
        .next()
        .and_then(|name| name.split_once('.'))
        .and_then(|(uid, gid)| Some((uid.parse::<u32>().ok()?, gid.parse::<u32>().ok()?)));
    match ids {
        Some((uid, gid)) if uid == gid => Ok(IdSpace::Shared(IdMap {
            first: uid,
            count: 65_536,
        })),
        Some((uid, gid)) => Err(format!(
            "userns-remap maps users from {uid} and groups from {gid}; give both the same range in /etc/subuid and /etc/subgid"
        )),
        None => Err(format!(
            "userns-remap is on, but the root directory {root} does not name its ids"
        )),
    }
}

#[async_trait]
impl Runtime for Docker {
    async fn ping(&self) -> Result<(), Error> {
        self.call("ping", self.options.call_limit, compat::ping)
            .await
    }

    async fn ids(&self) -> Result<IdSpace, Error> {
        let ids = self.ids.get_or_try_init(|| async {
            id_space(&self.info().await?).map_err(|message| Error::Refused {
                call: "ids",
                message,
            })
        });
        ids.await.copied()
    }

    async fn image(&self, reference: &str) -> Result<Image, Error> {
        self.call("image", self.options.call_limit, |client| async move {
            client
                .inspect_image(reference)
                .await
                .map(|found| compat::image(found, reference))
                .map_err(translate("image", reference))
        })
        .await
    }

    async fn images(&self) -> Result<Vec<LocalImage>, Error> {
        self.call("images", self.options.call_limit, compat::images)
            .await
    }

    async fn create(&self, spec: &Spec) -> Result<String, Error> {
        let map = match self.ids().await? {
            IdSpace::Shared(map) => map,
            _ => IdMap {
                first: 0,
                count: 65_536,
            },
        };
        if spec.ids != map {
            let message = format!(
                "the workspace belongs to the ids from {} on, but Docker maps sandboxes to those from {} on",
                spec.ids.first, map.first
            );
            return Err(Error::Refused {
                call: "create",
                message,
            });
        }
        self.call("create", 2 * self.options.call_limit, |client| async move {
            let image = client
                .inspect_image(&spec.image_id)
                .await
                .map_err(translate("image", &spec.image_id))?;
            let body = self.create_body(spec, &image.config.unwrap_or_default())?;
            let options = CreateContainerOptions {
                name: Some(spec.name.clone()),
                ..Default::default()
            };
            client
                .create_container(Some(options), body)
                .await
                .map(|created| created.id)
                .map_err(translate("create", &spec.image_id))
        })
        .await
    }

    async fn start(&self, name: &str) -> Result<(), Error> {
        self.call("start", 2 * self.options.call_limit, |client| async move {
            client
                .start_container(name, None)
                .await
                .map_err(translate("start", name))
        })
        .await
    }

    async fn inspect(&self, name: &str) -> Result<Container, Error> {
        let found = self
            .call("inspect", self.options.call_limit, |client| async move {
                client
                    .inspect_container(name, None)
                    .await
                    .map_err(translate("inspect", name))
            })
            .await?;
        let state = found.state.unwrap_or_default();
        let running = state.running.unwrap_or_default();
        Ok(Container {
            id: found.id.unwrap_or_default(),
            name: found
                .name
                .unwrap_or_default()
                .trim_start_matches('/')
                .to_owned(),
            running,
            pid: state
                .pid
                .filter(|_| running)
                .and_then(|pid| pid.try_into().ok())
                .unwrap_or_default(),
            exit_code: state.exit_code.filter(|_| !running),
            labels: found
                .config
                .and_then(|config| config.labels)
                .unwrap_or_default()
                .into_iter()
                .collect(),
        })
    }

    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, Error> {
        let filters = HashMap::from([("label".to_owned(), vec![format!("{label}={value}")])]);
        let options = ListContainersOptions {
            all: true,
            filters: Some(filters),
            ..Default::default()
        };
        let found = self
            .call("list", self.options.call_limit, |client| async move {
                client
                    .list_containers(Some(options))
                    .await
                    .map_err(translate("list", "list"))
            })
            .await?;
        Ok(found
            .into_iter()
            .map(|summary| Container {
                id: summary.id.unwrap_or_default(),
                name: summary
                    .names
                    .unwrap_or_default()
                    .first()
                    .map(|name| name.trim_start_matches('/').to_owned())
                    .unwrap_or_default(),
                running: summary
                    .state
                    .is_some_and(|state| state.to_string() == "running"),
                pid: 0,
                exit_code: None,
                labels: summary.labels.unwrap_or_default().into_iter().collect(),
            })
            .collect())
    }

    async fn kill(&self, name: &str, signal: &str) -> Result<(), Error> {
        self.call("kill", self.options.call_limit, |client| {
            compat::kill(client, name, signal)
        })
        .await
    }

    async fn remove(&self, name: &str) -> Result<(), Error> {
        compat::remove_by(name, || {
            self.call("remove", self.options.call_limit, |client| {
                compat::remove(client, name)
            })
        })
        .await
    }

    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, Error> {
        self.call("exec", self.options.call_limit, async |client| {
            let id = compat::create_exec(&client, name, spec).await?;
            match spec.tty {
                Some(size) => {
                    let unavailable = |error: reqwest::Error| Error::Unavailable(error.to_string());
                    let http = reqwest::Client::builder()
                        .unix_socket(self.options.socket.as_path())
                        .build()
                        .map_err(unavailable)?;
                    compat::start_terminal(&http, "http://docker", id, size).await
                }
                None => compat::start_exec(&client, id, name).await,
            }
        })
        .await
    }

    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, Error> {
        self.call("exec_state", self.options.call_limit, |client| {
            compat::exec_state(client, id)
        })
        .await
    }

    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), Error> {
        self.call("exec_resize", self.options.call_limit, |client| {
            compat::exec_resize(client, id, columns, rows)
        })
        .await
    }

    async fn close(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(root: &str, options: &[&str]) -> SystemInfo {
        SystemInfo {
            docker_root_dir: Some(root.to_owned()),
            security_options: Some(options.iter().map(|option| (*option).to_owned()).collect()),
            ..Default::default()
        }
    }

    #[test]
    fn the_map_of_ids_is_read_from_what_the_daemon_says() {
        assert_eq!(
            id_space(&info("/var/lib/docker", &["name=seccomp,profile=default"])),
            Ok(IdSpace::Host)
        );
        let remapped = id_space(&info(
            "/var/lib/docker/100000.100000",
            &["name=seccomp,profile=default", "name=userns"],
        ));
        assert_eq!(
            remapped,
            Ok(IdSpace::Shared(IdMap {
                first: 100_000,
                count: 65_536
            }))
        );
        assert!(
            id_space(&info("/var/lib/docker/100000.200000", &["name=userns"])).is_err(),
            "ranges that differ"
        );
        assert!(
            id_space(&info("/var/lib/docker", &["name=userns"])).is_err(),
            "a root directory without ids"
        );
        assert!(
            id_space(&info("/home/a/docker", &["name=rootless"])).is_err(),
            "rootless"
        );
    }

    #[test]
    fn paths_of_volumes_are_seen_as_docker_sees_them() {
        assert_eq!(clean("//a/./b/../c/"), "/a/c");
        assert_eq!(clean("/../workspace"), "/workspace");
    }

    #[test]
    fn an_images_volumes_get_nothing_writable_and_nothing_below_ours() {
        let docker = Docker::new(DockerOptions {
            socket: PathBuf::new(),
            directory: PathBuf::from("/files"),
            oci_runtime: None,
            call_limit: Duration::from_secs(1),
        });
        let spec = Spec {
            name: "x".to_owned(),
            labels: std::collections::BTreeMap::new(),
            image_id: String::new(),
            argv: Vec::new(),
            env: Vec::new(),
            ids: IdMap {
                first: 0,
                count: 65_536,
            },
            mounts: vec![super::super::Mount {
                source: "/data".into(),
                target: "/workspace".to_owned(),
                read_only: false,
            }],
            limits: cynode_api::Limits::default(),
            cgroup_parent: None,
        };
        let image = |volume: &str| ImageConfig {
            volumes: Some(vec![volume.to_owned()]),
            ..Default::default()
        };
        let count = |image: &ImageConfig| docker.mounts(&spec, image).expect("mounts").len();
        assert_eq!(count(&image("/workspace/")), 4, "ours is there already");
        assert_eq!(count(&image("/tmp")), 4);
        let mounts = docker.mounts(&spec, &image("/workspaces")).expect("mounts");
        assert_eq!(
            (mounts[4].typ, mounts[4].read_only),
            (Some(MountType::TMPFS), Some(true))
        );
        assert!(
            docker
                .mounts(&spec, &image("/workspace/../workspace/sub"))
                .is_err(),
            "below ours"
        );
    }
}
