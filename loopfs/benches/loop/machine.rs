//! A description of the machine on which the benchmark runs.

use crate::Result;

/// Prints the header line, with the type of the file system that the backing files or the quotas are on.
pub(crate) fn print(directory: &std::path::Path) -> Result<()> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo")?;
    let field = |name: &str| cpuinfo.lines().find(|line| line.starts_with(name))?.split(':').nth(1);
    // Some architectures have no model name.
    let cpu = field("model name").or_else(|| field("CPU part")).unwrap_or("unknown").trim();
    let cpus = std::thread::available_parallelism()?;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let file_system = file_system(directory)?;
    println!(r#"{{"cpu":{cpu:?},"cpus":{cpus},"kernel":{:?},"file_system":{file_system:?}}}"#, kernel.trim());
    Ok(())
}

fn file_system(directory: &std::path::Path) -> Result<String> {
    let directory = std::fs::File::open(directory)?;
    let mounts = loopfs::mount::table::read()?;
    let number = loopfs::loop_device::BackingFile::of(&directory)?.device;
    let found = mounts.iter().find(|mount| mount.device == number);
    Ok(found.map_or_else(|| "unknown".to_owned(), |mount| mount.fs_type.clone()))
}
