package evernear;

import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.handler.codec.http.FullHttpRequest;
import io.netty.handler.codec.http.HttpHeaderValues;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.multipart.DefaultHttpDataFactory;
import io.netty.handler.codec.http.multipart.HttpPostRequestDecoder;
import io.netty.handler.codec.http.multipart.HttpPostRequestDecoder.EndOfDataDecoderException;
import io.netty.util.ReferenceCountUtil;
import org.pytorch.serve.util.NettyUtils;

/** Rejects forms that TorchServe cannot parse. For these forms, TorchServe would return 500. */
final class Form extends ChannelInboundHandlerAdapter {
    private final int maxSize;

    Form(int maxSize) {
        this.maxSize = maxSize;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        FullHttpRequest request = (FullHttpRequest) message;
        if (isReadable(request)) {
            context.fireChannelRead(message);
            return;
        }
        ReferenceCountUtil.release(message);
        context.writeAndFlush(
                Rejection.of(
                        HttpResponseStatus.BAD_REQUEST,
                        "BadForm",
                        "The form cannot be read; send the image as its field \"data\", or as the body."));
    }

    private static boolean isForm(FullHttpRequest request) {
        return HttpPostRequestDecoder.isMultipart(request)
                || HttpHeaderValues.APPLICATION_X_WWW_FORM_URLENCODED.contentEqualsIgnoreCase(
                        HttpUtil.getMimeType(request));
    }

    /** Parses forms exactly like TorchServe. */
    private boolean isReadable(FullHttpRequest request) {
        try {
            if (!isForm(request)) {
                return true;
            }
            HttpPostRequestDecoder form =
                    new HttpPostRequestDecoder(new DefaultHttpDataFactory(maxSize), request.duplicate());
            try {
                while (form.hasNext()) {
                    NettyUtils.getFormData(form.next());
                }
            } catch (EndOfDataDecoderException end) {
                return true;
            } finally {
                form.cleanFiles();
                form.destroy();
            }
            return true;
        } catch (RuntimeException | AssertionError fault) {
            return false;
        }
    }
}
