package mounting

import (
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTheCallsOfMountForEachRequest(t *testing.T) {
	bind := call{source: "/s", flags: unix.MS_BIND}
	remount := func(flags, cleared uintptr) call {
		return call{source: "/s", flags: unix.MS_REMOUNT | unix.MS_BIND | flags, keep: restrictions &^ cleared}
	}
	propagation := func(flags uintptr) call { return call{source: "none", flags: flags} }
	for options, expected := range map[string][]call{
		"bind":                                  {bind},
		"rbind":                                 {{source: "/s", flags: unix.MS_BIND | unix.MS_REC}},
		"bind,ro":                               {bind, remount(unix.MS_RDONLY, 0)},
		"bind,rw":                               {bind},
		"bind,remount":                          {remount(0, 0)},
		"bind,remount,ro,relatime":              {remount(unix.MS_RDONLY|unix.MS_RELATIME, 0)},
		"bind,remount,ro,rw":                    {remount(0, unix.MS_RDONLY)},
		"bind,remount,rw,ro":                    {remount(unix.MS_RDONLY, 0)},
		"bind,remount,noexec,nodev,nosuid,exec": {remount(unix.MS_NODEV|unix.MS_NOSUID, unix.MS_NOEXEC)},
		"bind,rshared,ro":                       {bind, remount(unix.MS_RDONLY, 0), propagation(unix.MS_SHARED | unix.MS_REC)},
		"bind,shared,slave":                     {bind, propagation(unix.MS_SHARED), propagation(unix.MS_SLAVE)},
		"bind,,defaults,":                       {bind},
	} {
		calls, known := plan(Request{Source: "/s", Target: "/t", Options: strings.Split(options, ","), Arguments: []string{"--no-canonicalize"}})
		if !known || !reflect.DeepEqual(calls, expected) {
			t.Errorf("%s: %v %v", options, calls, known)
		}
	}
	for options, expected := range map[string]call{
		"":                           {source: "tmpfs", fstype: "tmpfs", flags: 0, data: ""},
		"size=1048576,noswap":        {source: "tmpfs", fstype: "tmpfs", flags: 0, data: "size=1048576,noswap"},
		"ro,size=50%,mode=0700":      {source: "tmpfs", fstype: "tmpfs", flags: unix.MS_RDONLY, data: "size=50%,mode=0700"},
		"uid=7,gid=8,mpol=local":     {source: "tmpfs", fstype: "tmpfs", flags: 0, data: "uid=7,gid=8,mpol=local"},
		"remount,size=1m,noexec":     {source: "tmpfs", fstype: "tmpfs", flags: unix.MS_REMOUNT | unix.MS_NOEXEC, data: "size=1m"},
		"nr_inodes=10,huge=never,rw": {source: "tmpfs", fstype: "tmpfs", flags: 0, data: "nr_inodes=10,huge=never"},
	} {
		calls, known := plan(Request{Source: "tmpfs", Target: "/t", FSType: "tmpfs", Options: strings.Split(options, ",")})
		if !known || !reflect.DeepEqual(calls, []call{expected}) {
			t.Errorf("%s: %v %v", options, calls, known)
		}
	}
}

func TestARequestThatTheKernelCannotServeAloneIsLeftToMount(t *testing.T) {
	for name, request := range map[string]Request{
		"another file system":              {Source: "server:/x", FSType: "nfs"},
		"ext4":                             {Source: "/dev/sda", FSType: "ext4"},
		"a type that the kernel detects":   {Source: "/dev/sda"},
		"a source from fstab":              {Source: "", Options: []string{"remount", "bind"}},
		"a source from the devices":        {Source: "UUID=1", Options: []string{"bind"}},
		"a bind with a type":               {Source: "/s", FSType: "ext4", Options: []string{"bind"}},
		"a bind of tmpfs":                  {Source: "/s", FSType: "tmpfs", Options: []string{"bind"}},
		"the table of mount(8)":            {Source: "/s", Options: []string{"bind", "_netdev"}},
		"an option of mount(8)":            {Source: "/s", Options: []string{"bind", "x-mount.mkdir"}},
		"a user's mount":                   {Source: "/s", Options: []string{"bind", "user"}},
		"a SELinux context":                {Source: "tmpfs", FSType: "tmpfs", Options: []string{`context="system_u:object_r:tmp_t:s0:c1,c2"`}},
		"quotes":                           {Source: "tmpfs", FSType: "tmpfs", Options: []string{`size="1m"`}},
		"an option with a comma":           {Source: "tmpfs", FSType: "tmpfs", Options: []string{"mpol=bind:0,2"}},
		"an owner by name":                 {Source: "tmpfs", FSType: "tmpfs", Options: []string{"uid=daemon"}},
		"an unknown option":                {Source: "tmpfs", FSType: "tmpfs", Options: []string{"usrquota"}},
		"an option of tmpfs for a bind":    {Source: "/s", Options: []string{"bind", "size=1m"}},
		"an argument of mount(8)":          {Source: "/s", Options: []string{"bind"}, Arguments: []string{"--fake"}},
		"more than the kernel would read":  {Source: "tmpfs", FSType: "tmpfs", Options: []string{"mode=" + strings.Repeat("0", unix.Getpagesize())}},
		"options that only change sharing": {Source: "/s", Options: []string{"rshared"}},
	} {
		if calls, known := plan(request); known {
			t.Errorf("%s: %v", name, calls)
		}
	}
}
