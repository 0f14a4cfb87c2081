//! Docker over its socket.
//!
//! Docker has one id map for the whole daemon (`userns-remap`) or none, so sandboxes share their
//! host ids: `ids` reports which, and the worker requires the operator's permission for that. Files
//! that Docker would copy from the host, such as its resolver configuration, are covered by the
//! worker's own; settings that an image could make are overridden.

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
    Container, ExecSpec, IdMap, IdSpace, Image, Runtime, RuntimeError, RuntimeExec,
    RuntimeExecState, Spec,
    compat::{self, translate},
    libpod, seccomp,
};

#[derive(Clone, Debug)]
pub struct DockerOptions {
    pub socket: PathBuf,
    /// Holds the files mounted in every sandbox as `/etc/hosts` and the like.
    pub directory: PathBuf,
    /// The name of the OCI runtime in the daemon's configuration; the daemon's default if absent.
    pub oci_runtime: Option<String>,
    /// Timeout of a call; creation, which waits for others, gets twice that.
    pub call_limit: Duration,
}

#[derive(Debug)]
pub struct Docker {
    options: DockerOptions,
    client: OnceCell<bollard::Docker>,
    ids: OnceCell<IdSpace>,
}

/// Files mounted over those that Docker would copy from the host.
const ETC_FILES: [(&str, &str); 3] = [
    ("hosts", libpod::HOSTS),
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

    async fn client(&self) -> Result<bollard::Docker, RuntimeError> {
        let client = self.client.get_or_try_init(|| async {
            let client = compat::connect(&self.options.socket, self.options.call_limit)
                .await
                .map_err(|error| {
                    RuntimeError::Unavailable(format!(
                        "Docker does not answer on {}: {error}",
                        self.options.socket.display()
                    ))
                })?;
            self.write_files().map_err(|error| {
                RuntimeError::Unavailable(format!(
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
        for (name, text) in ETC_FILES {
            let path = self.options.directory.join(name);
            // Running sandboxes have the file mounted, so an up-to-date one is not replaced.
            if fs_err::read_to_string(&path).ok().as_deref() != Some(text) {
                cynode_service::files::replace(&path, text.as_bytes())?;
            }
            fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        }
        Ok(())
    }

    /// Runs a call with a timeout.
    async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        run: impl FnOnce(bollard::Docker) -> F,
    ) -> Result<T, RuntimeError>
    where
        F: Future<Output = Result<T, RuntimeError>>,
    {
        let started = std::time::Instant::now();
        let client = self.client().await?;
        let result = tokio::time::timeout(limit, run(client))
            .await
            .map_err(|_| RuntimeError::Timeout { call, limit })?;
        metrics::histogram!("cynode_runtime_call_seconds", "call" => call)
            .record(started.elapsed().as_secs_f64());
        result
    }

    /// The daemon's information about itself.
    pub(crate) async fn info(&self) -> Result<SystemInfo, RuntimeError> {
        self.call("info", self.options.call_limit, |client| async move {
            client.info().await.map_err(translate("info", "info"))
        })
        .await
    }

    /// Creates an image from one layer.
    pub(crate) async fn import(&self, repository: &str, layer: Bytes) -> Result<(), RuntimeError> {
        let options = CreateImageOptions {
            from_src: Some("-".to_owned()),
            repo: Some(repository.to_owned()),
            ..Default::default()
        };
        self.call("import", 2 * self.options.call_limit, |client| async move {
            let progress: Vec<_> = client
                .create_image(Some(options), Some(bollard::body_full(layer)), None)
                .try_collect()
                .await
                .map_err(translate("import", repository))?;
            match progress.into_iter().find_map(|info| info.error_detail) {
                Some(error) => Err(RuntimeError::Refused {
                    call: "import",
                    message: error.message.unwrap_or_default(),
                }),
                None => Ok(()),
            }
        })
        .await
    }

    pub(crate) async fn remove_image(&self, reference: &str) -> Result<(), RuntimeError> {
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

    fn create_body(
        &self,
        spec: &Spec,
        image: &ImageConfig,
    ) -> Result<ContainerCreateBody, RuntimeError> {
        // A name without a value removes a variable that the image would add.
        let is_set = |name: &str| spec.env.iter().any(|(own, _)| own == name);
        let unset = image
            .env
            .iter()
            .flatten()
            .filter_map(|variable| variable.split('=').next())
            .filter(|name| !name.is_empty() && !is_set(name));
        let env = spec
            .env
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .chain(unset.map(str::to_owned))
            .collect();
        Ok(ContainerCreateBody {
            image: Some(spec.image_id.clone()),
            labels: Some(spec.labels.clone().into_iter().collect()),
            // The whole command as entrypoint: an empty one would be filled in by the image's.
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

    fn host_config(&self, spec: &Spec, image: &ImageConfig) -> Result<HostConfig, RuntimeError> {
        let limits = &spec.limits;
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let memory = Some(signed(limits.memory_bytes));
        let ulimit = |(name, value): (&str, u64)| ResourcesUlimits {
            name: Some(name.to_owned()),
            soft: Some(signed(value)),
            hard: Some(signed(value)),
        };
        let tmpfs =
            libpod::tmpfs_mounts(limits.memory_bytes)
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
            cpu_period: Some(signed(libpod::CPU_PERIOD_MICROS)),
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

    fn mounts(&self, spec: &Spec, image: &ImageConfig) -> Result<Vec<Mount>, RuntimeError> {
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
        let files = ETC_FILES.map(|(name, _)| {
            bind(
                self.options.directory.join(name).display().to_string(),
                format!("/etc/{name}"),
                true,
            )
        });
        let binds = spec.mounts.iter().map(|mount| {
            bind(
                mount.source.display().to_string(),
                mount.target.clone(),
                mount.read_only,
            )
        });
        let mut mounts: Vec<Mount> = files.into_iter().chain(binds).collect();
        // For each volume that an image declares, Docker creates a writable volume on the host's
        // disk, unless something is mounted there. So mount an empty, read-only tmpfs.
        for volume in image.volumes.iter().flatten() {
            let path = clean(volume);
            if let Some(mount) = spec.mounts.iter().find(|mount| {
                path.strip_prefix(&mount.target)
                    .is_some_and(|rest| rest.starts_with('/'))
            }) {
                // Its mount point would be created in the host's files that are mounted there.
                return Err(RuntimeError::Refused {
                    call: "create",
                    message: format!("the image declares a volume {path} below {}", mount.target),
                });
            }
            if mounts
                .iter()
                .any(|mount| mount.target.as_deref() == Some(&path))
                || libpod::tmpfs_mounts(0)
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

/// Normalizes an absolute path as Docker does: no `.`, `..` or double slashes.
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

/// The daemon's id map. The name of its root directory ends in the host ids of root inside.
pub(crate) fn id_space(info: &SystemInfo) -> Result<IdSpace, String> {
    let option = |name: &str| {
        info.security_options
            .iter()
            .flatten()
            .any(|option| option.split(',').any(|part| part == format!("name={name}")))
    };
    if option("rootless") {
        return Err(
            "the daemon is rootless, which is not supported: use Podman for that".to_owned(),
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
            "userns-remap maps users from {uid} and groups from {gid}; set the same range in \
             /etc/subuid and /etc/subgid"
        )),
        None => Err(format!(
            "userns-remap is on, but the root directory {root} does not contain its ids"
        )),
    }
}

#[async_trait]
impl Runtime for Docker {
    async fn ping(&self) -> Result<(), RuntimeError> {
        self.call("ping", self.options.call_limit, compat::ping)
            .await
    }

    async fn ids(&self) -> Result<IdSpace, RuntimeError> {
        let ids = self.ids.get_or_try_init(|| async {
            id_space(&self.info().await?).map_err(|message| RuntimeError::Refused {
                call: "ids",
                message,
            })
        });
        ids.await.copied()
    }

    async fn image(&self, reference: &str) -> Result<Image, RuntimeError> {
        self.call("image", self.options.call_limit, |client| async move {
            client
                .inspect_image(reference)
                .await
                .map(|inspected| compat::image(inspected, reference))
                .map_err(translate("image", reference))
        })
        .await
    }

    async fn images(&self) -> Result<Vec<LocalImage>, RuntimeError> {
        self.call("images", self.options.call_limit, compat::images)
            .await
    }

    async fn create(&self, spec: &Spec) -> Result<String, RuntimeError> {
        let map = match self.ids().await? {
            IdSpace::Shared(map) => map,
            _ => IdMap {
                first: 0,
                count: 65_536,
            },
        };
        if spec.ids != map {
            let message = format!(
                "the workspace belongs to the ids from {}, but Docker maps sandboxes to those \
                 from {}",
                spec.ids.first, map.first
            );
            return Err(RuntimeError::Refused {
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

    async fn start(&self, name: &str) -> Result<(), RuntimeError> {
        self.call("start", 2 * self.options.call_limit, |client| async move {
            client
                .start_container(name, None)
                .await
                .map_err(translate("start", name))
        })
        .await
    }

    async fn inspect(&self, name: &str) -> Result<Container, RuntimeError> {
        let inspected = self
            .call("inspect", self.options.call_limit, |client| async move {
                client
                    .inspect_container(name, None)
                    .await
                    .map_err(translate("inspect", name))
            })
            .await?;
        let state = inspected.state.unwrap_or_default();
        let running = state.running.unwrap_or_default();
        Ok(Container {
            id: inspected.id.unwrap_or_default(),
            name: inspected
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
            labels: inspected
                .config
                .and_then(|config| config.labels)
                .unwrap_or_default()
                .into_iter()
                .collect(),
        })
    }

    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, RuntimeError> {
        let filters = HashMap::from([("label".to_owned(), vec![format!("{label}={value}")])]);
        let options = ListContainersOptions {
            all: true,
            filters: Some(filters),
            ..Default::default()
        };
        let summaries = self
            .call("list", self.options.call_limit, |client| async move {
                client
                    .list_containers(Some(options))
                    .await
                    .map_err(translate("list", "list"))
            })
            .await?;
        Ok(summaries
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

    async fn kill(&self, name: &str, signal: &str) -> Result<(), RuntimeError> {
        self.call("kill", self.options.call_limit, |client| {
            compat::kill(client, name, signal)
        })
        .await
    }

    async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        compat::remove_with_retries(name, || {
            self.call("remove", self.options.call_limit, |client| {
                compat::remove(client, name)
            })
        })
        .await
    }

    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, RuntimeError> {
        self.call("exec", self.options.call_limit, async |client| {
            let id = compat::create_exec(&client, name, spec).await?;
            match spec.tty {
                Some(size) => {
                    let unavailable =
                        |error: reqwest::Error| RuntimeError::Unavailable(error.to_string());
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

    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, RuntimeError> {
        self.call("exec_state", self.options.call_limit, |client| {
            compat::exec_state(client, id)
        })
        .await
    }

    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), RuntimeError> {
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
    fn the_id_map_is_derived_from_the_daemons_information() {
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
            "different ranges were accepted"
        );
        assert!(
            id_space(&info("/var/lib/docker", &["name=userns"])).is_err(),
            "a root directory without ids was accepted"
        );
        assert!(
            id_space(&info("/home/a/docker", &["name=rootless"])).is_err(),
            "rootless"
        );
    }

    #[test]
    fn volume_paths_are_normalized_as_docker_does() {
        assert_eq!(clean("//a/./b/../c/"), "/a/c");
        assert_eq!(clean("/../workspace"), "/workspace");
    }

    #[test]
    fn image_volumes_are_read_only_and_not_allowed_below_our_mounts() {
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
        assert_eq!(
            count(&image("/workspace/")),
            4,
            "a volume was mounted over ours"
        );
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
            "a volume below our mount was accepted"
        );
    }
}
