//! The times of the calls for one kind of volumes, with one number of volumes on the node.

use loopfs::volume_store::VolumeKind;

use crate::Result;
use crate::samples::Samples;
use crate::support::Client;
use crate::volume::Volume;

pub(crate) struct Calls {
    publish: Samples,
    stats: Samples,
    expand: Samples,
    unpublish: Samples,
}

impl Calls {
    pub(crate) fn new(kind: VolumeKind, volumes: usize) -> Calls {
        let [publish, stats, expand, unpublish] = match kind {
            VolumeKind::Filesystem => {
                ["publish_filesystem", "stats_filesystem", "expand_filesystem", "unpublish_filesystem"]
            }
            VolumeKind::Block => ["publish_block", "stats_block", "expand_block", "unpublish_block"],
        };
        let samples = |name| Samples::new(name, volumes);
        Calls {
            publish: samples(publish),
            stats: samples(stats),
            expand: samples(expand),
            unpublish: samples(unpublish),
        }
    }

    /// Uses a volume as a pod does, from its start to its end. Staging and the work on disk are not measured. If `counts` is
    /// `false`, nothing is recorded.
    pub(crate) fn round(&mut self, client: &Client, volume: &mut Volume, counts: bool) -> Result<()> {
        volume.stage(client)?;
        self.publish.share(counts, 1, || volume.publish(client))?;
        self.stats.share(counts, 1, || volume.stats(client))?;
        volume.expand_on_disk(client)?;
        self.expand.share(counts, 1, || volume.expand(client))?;
        self.unpublish.share(counts, 1, || volume.unpublish(client))?;
        volume.unstage(client)
    }

    pub(crate) fn print(self) {
        [self.publish, self.stats, self.expand, self.unpublish].into_iter().for_each(Samples::print);
    }
}
